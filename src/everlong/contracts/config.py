"""What every `ThingConfig` is: frozen, strict about unknown keys, documented field by field by the string below it."""

from pydantic import ConfigDict
from pydantic_config import BaseConfig


class Config(BaseConfig):
    """Settings of one thing; a parent holds its children's configs, never copies of their fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
