from dataclasses import dataclass


@dataclass
class StructuredOutputsParams:
    regex: str | None = None
