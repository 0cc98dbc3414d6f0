"""What is to be generated."""

from dataclasses import dataclass

from ..errors import ConfigError
from ..spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Job:
    """``n_sequences`` prompts of ``prompt_len`` tokens, ``gen_len`` new tokens for each."""

    prompt_len: int
    gen_len: int
    n_sequences: int = 1

    def validate(self, spec: ModelSpec) -> "Job":
        """Return self; raises ConfigError naming the value and the limit."""
        for name in ("prompt_len", "gen_len", "n_sequences"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.context > spec.max_positions:
            raise ConfigError(
                f"prompt_len {self.prompt_len} and gen_len {self.gen_len} make {self.context} positions; this model "
                f"was made for at most {spec.max_positions}. Lower one of them"
            )
        return self

    @property
    def context(self) -> int:
        """Positions of one sequence at its end."""
        return self.prompt_len + self.gen_len
