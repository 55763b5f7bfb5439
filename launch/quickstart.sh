#!/usr/bin/env bash
# The main job on a laptop: installs once, then trains the tiny model, or another +experiment=NAME. Arguments go on to
# Hydra: key=value …
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/install.sh"
cd "$root"
[[ " $*" == *' +experiment='* ]] || set -- +experiment=dapo_tiny "$@"
exec .venv/bin/python -m dapo.main_ppo "$@"
