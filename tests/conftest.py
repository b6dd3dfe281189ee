"""Hypothesis profiles: `default` keeps the suite short, `soak` is for long runs (`HYPOTHESIS_PROFILE=soak`)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]

settings.register_profile("default", deadline=None, derandomize=True, suppress_health_check=_CHECKS, print_blob=True)
settings.register_profile("soak", deadline=None, max_examples=2000, suppress_health_check=_CHECKS, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
