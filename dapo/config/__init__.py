"""Holds what can be set, and how it is checked before any worker starts; imports no torch, no transformers and no
Ray.
"""

from dapo.config.schema import Config as Config
