"""The configuration: its keys, and checks of it before any worker starts. Imports no torch, transformers or Ray."""

from dapo.config.schema import Config as Config
