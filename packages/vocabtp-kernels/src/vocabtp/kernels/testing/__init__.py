"""The rule that judges an implementation, the cases it must pass, and ranks inside one process.

Nothing here needs a test framework: a check raises AssertionError. `assert_no_worse` is the rule,
`CASES` are the inputs that break implementations, and `check_case` runs one of them, values and
gradients, whole or in shards, against `vocabtp.kernels.reference`.
"""

from vocabtp.kernels.testing.cases import CASES, OPS, Case, check_case, run_case
from vocabtp.kernels.testing.inputs import Inputs
from vocabtp.kernels.testing.ranks import ThreadExchange, run_sharded
from vocabtp.kernels.testing.rule import assert_no_worse

__all__ = [
    "CASES",
    "OPS",
    "Case",
    "Inputs",
    "ThreadExchange",
    "assert_no_worse",
    "check_case",
    "run_case",
    "run_sharded",
]
