"""Only names that are bound to Ray are uses of Ray."""

from __future__ import annotations

from tests.unit.migrate.before_and_after import dedent_script, manual_work, migrated_text


def test_a_parameter_or_a_local_name_is_not_the_module() -> None:
    assert migrated_text("""
        import ray.train
        def f(ray):
            return ray.train.report
        def g():
            ray = object()
            return ray.train
        h = [ray.train for ray in ()]
        ray.train.report({})
    """) == dedent_script("""
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
    script = dedent_script("""
        import ray.train
        scene.ray.train = shoot(ray=3)
    """)
    assert migrated_text(script) == script.replace("ray.train\n", "spotfit\n", 1)


def test_a_module_alias_is_preserved() -> None:
    assert migrated_text("""
        from ray import train as t
        import ray.train.torch as rtt
        from ray.train import report as tell
        tell({"size": t.get_context().get_world_size(), "on": rtt.get_device()})
    """) == dedent_script("""
        import spotfit as t
        import spotfit.torch as rtt
        from spotfit import report as tell
        tell({"size": t.get_context().get_world_size(), "on": rtt.get_device()})
    """)


def test_an_ambiguous_name_is_manual_work() -> None:
    script = dedent_script("""
        try:
            import ray
        except ImportError:
            import fake_ray as ray
        ray.train.report({})
    """)
    assert migrated_text(script) == script
    assert manual_work(script) == ["6: ray.train.report"]


def test_a_function_sees_the_import_of_its_module() -> None:
    assert migrated_text("""
        import ray
        class Worker:
            loss: "ray.train.Result"
            def run(self):
                def inner():
                    return ray.train.get_checkpoint()
                return inner()
    """) == dedent_script("""
        import spotfit
        class Worker:
            loss: "spotfit.Result"
            def run(self):
                def inner():
                    return spotfit.get_checkpoint()
                return inner()
    """)


def test_a_chain_over_lines_and_calls() -> None:
    assert migrated_text("""
        import ray.train
        rank = (
            ray.train.get_context()  # who I am
            .get_world_rank()
        )
        path = (ray.train.Checkpoint).from_directory("/tmp/x").path
    """) == dedent_script("""
        import spotfit
        rank = (
            spotfit.get_context()  # who I am
            .get_world_rank()
        )
        path = (spotfit.Checkpoint).from_directory("/tmp/x").path
    """)


def test_docstrings_are_unchanged() -> None:
    script = dedent_script('''
        """Uses ray.train.report, and RAY_TRAIN_HEALTH_CHECK_INTERVAL_S."""
        def f():
            "Calls ray.train.report."
    ''')
    assert migrated_text(script) == script
    assert manual_work(script) == []
