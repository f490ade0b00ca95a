"""In the place of OpenRLHF's program: prints which classes a worker of its Ray makes policies of."""

import os

import ray


@ray.remote
def look() -> tuple[str, ...]:
    from openrlhf_actors import add_stand_ins

    add_stand_ins()
    import openrlhf.models
    from openrlhf.trainer.ray import launcher, ppo_actor

    made = (launcher.Actor, ppo_actor.Actor, openrlhf.models.Actor)
    return (os.environ["ASKED_BY_THE_PROGRAM"], *(kind.__name__ for kind in made))


ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": {"ASKED_BY_THE_PROGRAM": "yes"}})
print(*ray.get(look.remote()))
