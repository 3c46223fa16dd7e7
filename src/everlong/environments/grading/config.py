"""Who says what an episode is worth."""

from pydantic import Field

from everlong.contracts.config import Config
from everlong.contracts.import_path import PATTERN


class GradingConfig(Config):
    type: str = Field("verifier", pattern=rf"^(verifier|{PATTERN})$")
    """verifier: the task's own tests/test.sh. Or a `Grader` of your own, as package.module:name."""
