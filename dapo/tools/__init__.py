"""Commands: `python -m dapo.NAME` runs `dapo/tools/NAME`. Nothing but `dapo.main_ppo` imports them."""
