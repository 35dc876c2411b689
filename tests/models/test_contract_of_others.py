"""The contract of the families that `test_contract.py` leaves out: half of them alone, too."""

from tests.models import test_contract
from tests.models.test_contract import *  # noqa: F403

OF_THIS_FILE = [name for name in test_contract.FAMILIES if name not in test_contract.OF_THIS_FILE]
