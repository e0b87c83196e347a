"""What travels through the pipeline: requests, encoded prompts, events. Values only, without behaviour.

Dialects in api/ make Requests and turn Events back into their wire formats; every stage in between sees only these.
"""

from gateway.types.events import *
from gateway.types.prompts import *
from gateway.types.requests import *
from gateway.types.stored import *
from gateway.types.tenants import *
from gateway.types.upstreams import *
