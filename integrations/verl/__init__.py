"""verl drop-in: importing this package puts estimators, losses and trainers named `fastadv_*` into verl's registries.

verl 0.9 and later import it by themselves (entry-point group `verl.plugins`); for 0.6 to 0.8 set
`VERL_USE_EXTERNAL_MODULES=fastadv.integrations.verl` in the environment of every process.
"""

from fastadv.integrations.verl.registration import Registered, register, register_as_plugin

__all__ = ["Registered", "register"]

register_as_plugin()
