"""torchtune recipes that find their own batch size."""

__version__ = "0.1.0"
