"""Settings of the gateway and of `kvasir serve`: one frozen section per stage. Read with engine.config.load.

A section goes to the stage it is named after and to nobody else; app.py hands them out.
"""

from engine.config import ConfigError as ConfigError
from gateway.config.apis import *
from gateway.config.reloading import Reloaded as Reloaded
from gateway.config.reloading import differences as differences
from gateway.config.reloading import mixed as mixed
from gateway.config.replicas import *
from gateway.config.serving import *
from gateway.config.settings import Settings as Settings
from gateway.config.stages import *
from gateway.config.tenants import *
from gateway.config.units import *
from gateway.config.upstreams import *
from gateway.config.warm import *
