"""Reading a script: a name is of Ray only where it is bound to Ray."""

from __future__ import annotations

from tests.unit.migrate.before_and_after import left, moved, text


def test_a_parameter_or_a_local_name_is_not_the_module() -> None:
    assert moved("""
        import ray.train
        def f(ray):
            return ray.train.report
        def g():
            ray = object()
            return ray.train
        h = [ray.train for ray in ()]
        ray.train.report({})
    """) == text("""
        import spotfit
        def f(ray):
            return ray.train.report
        def g():
            ray = object()
            return ray.train
        h = [ray.train for ray in ()]
        spotfit.report({})
    """)


def test_a_keyword_and_an_attribute_of_that_name_are_not_the_module() -> None:
    script = text("""
        import ray.train
        scene.ray.train = shoot(ray=3)
    """)
    assert moved(script) == script.replace("ray.train\n", "spotfit\n", 1)


def test_a_module_by_another_name_keeps_it() -> None:
    assert moved("""
        from ray import train as t
        import ray.train.torch as rtt
        from ray.train import report as tell
        tell({"size": t.get_context().get_world_size(), "on": rtt.get_device()})
    """) == text("""
        import spotfit as t
        import spotfit.torch as rtt
        from spotfit import report as tell
        tell({"size": t.get_context().get_world_size(), "on": rtt.get_device()})
    """)


def test_a_name_that_may_be_two_things_is_left_to_a_hand() -> None:
    script = text("""
        try:
            import ray
        except ImportError:
            import fake_ray as ray
        ray.train.report({})
    """)
    assert moved(script) == script
    assert left(script) == ["6: ray.train.report"]


def test_a_function_sees_the_import_of_its_module() -> None:
    assert moved("""
        import ray
        class Worker:
            loss: "ray.train.Result"
            def run(self):
                def inner():
                    return ray.train.get_checkpoint()
                return inner()
    """) == text("""
        import spotfit
        class Worker:
            loss: "spotfit.Result"
            def run(self):
                def inner():
                    return spotfit.get_checkpoint()
                return inner()
    """)


def test_a_chain_over_lines_and_calls() -> None:
    assert moved("""
        import ray.train
        rank = (
            ray.train.get_context()  # who I am
            .get_world_rank()
        )
        path = (ray.train.Checkpoint).from_directory("/tmp/x").path
    """) == text("""
        import spotfit
        rank = (
            spotfit.get_context()  # who I am
            .get_world_rank()
        )
        path = (spotfit.Checkpoint).from_directory("/tmp/x").path
    """)


def test_documentation_is_not_touched() -> None:
    script = text('''
        """Uses ray.train.report, and RAY_TRAIN_HEALTH_CHECK_INTERVAL_S."""
        def f():
            "Calls ray.train.report."
    ''')
    assert moved(script) == script
    assert left(script) == []
