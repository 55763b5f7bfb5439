"""`dapo.main_ppo` with engines and ranks placed by GPUs that are not there."""

from dapo import fleet
from dapo.main_ppo import main
from tests.support.nodes import OnNodes

fleet.Placement = OnNodes  # type: ignore[misc]
main()
