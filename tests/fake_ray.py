"""Ray in this process: actors are objects, and calls run when somebody waits for them, in a random order.

Tests of what must not depend on workers, their order and their deaths need no processes for that.
"""

import random
from types import SimpleNamespace

import ray
import ray.cloudpickle  # the module that packing imports from whatever ``ray`` is


class Reference:
    def __init__(self, actor, call):
        self.actor, self.call, self.done = actor, call, False

    def run(self, ray):
        self.done = True
        try:
            if self.actor.dead or ray.dies(self):
                self.actor.dead = True
                raise ray.exceptions.ActorDiedError
            self.value, self.error = self.call(), None
        except Exception as error:
            self.value, self.error = None, error


class Method:
    def __init__(self, ray, actor, name):
        self.ray, self.actor, self.name = ray, actor, name

    def remote(self, *arguments):
        def call():
            return getattr(self.actor.instance, self.name)(*arguments)

        reference = Reference(self.actor, call)
        reference.name = self.name
        return reference


class Actor:
    def __init__(self, ray, kind, arguments):
        self.ray, self.dead, self.instance = ray, False, kind(*arguments)

    def __getattr__(self, name):
        return Method(self.ray, self, name)


class FakeRay:
    def __init__(self, cpus, seed=0):
        self.cpus, self.rng, self.exceptions = cpus, random.Random(seed), ray.exceptions
        self.cloudpickle = ray.cloudpickle
        self.dies = lambda _reference: False
        self.started = 0

    def put(self, value):
        return value

    def remote(self, **_options):
        def decorate(kind):
            def start(*arguments):
                self.started += 1
                return Actor(self, kind, arguments)

            return SimpleNamespace(remote=start)

        return decorate

    def wait(self, references, *, num_returns, timeout):
        if num_returns == 1 and timeout:
            self.rng.choice([each for each in references if not each.done]).run(self)
        return [each for each in references if each.done], [each for each in references if not each.done]

    def get(self, reference):
        if reference.error:
            raise reference.error
        return reference.value

    def kill(self, actor, no_restart):
        assert no_restart
        actor.dead = True

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": float(self.cpus)}
