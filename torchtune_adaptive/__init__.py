"""torchtune recipes that find their own batch size."""
