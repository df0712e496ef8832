"""The text: comments, blank lines, line ends and encodings stay as they are."""

from __future__ import annotations

from spotfit.migrate.rewrite import rewrite
from tests.unit.migrate.before_and_after import moved, text


def test_comments_stay_even_where_their_line_went() -> None:
    assert moved("""
        # Copyright
        import ray  # the cluster
        from ray.train import report  # only this

        def main():
            # two workers and one for the trainer
            ray.init()

            # now train
            report({})
            ray.shutdown()
            # the end
    """) == text("""
        # Copyright
        from spotfit import report  # only this

        def main():
            # two workers and one for the trainer

            # now train
            report({})
            # the end
    """)


def test_groups_of_lines_stay_apart() -> None:
    assert moved("""
        import torch

        import ray
        import ray.train as train
        args = 1

        ray.init()

        train.report({})
    """) == text("""
        import torch

        import spotfit as train
        args = 1

        train.report({})
    """)


def test_a_comment_at_the_end_of_a_script_stays() -> None:
    assert moved("import ray\nprint(1)\n# done:\nray.shutdown()\n") == "print(1)\n# done:\n"


def test_line_ends_tabs_and_a_missing_last_one_stay() -> None:
    script = b"import ray.train\r\ndef f():\r\n\tray.train.report({})"
    assert rewrite(script).text == b"import spotfit\r\ndef f():\r\n\tspotfit.report({})"


def test_an_encoding_stays() -> None:
    script = "# -*- coding: latin-1 -*-\nimport ray.train\nname = 'é'\n".encode("latin-1")
    expected = "# -*- coding: latin-1 -*-\nimport spotfit\nname = 'é'\n".encode("latin-1")
    assert rewrite(script).text == expected


def test_quotes_of_a_text_stay() -> None:
    assert moved("a = r'''RAY_TRAIN_COLLECTIVE_TIMEOUT_S'''\n") == (
        "a = r'''SPOTFIT_COLLECTIVE_TIMEOUT_S'''\n"
    )


def test_decorators_defaults_and_base_classes_are_code_too() -> None:
    assert moved("""
        import ray.train
        class Tell(ray.train.UserCallback):
            mode: ray.train.CheckpointUploadMode = ray.train.CheckpointUploadMode.SYNC
            def f(self, config=ray.train.RunConfig()) -> ray.train.Result: ...
        print(f"{ray.train.get_checkpoint()}", *ray.train.get_all_reported_checkpoints())
    """) == text("""
        import spotfit
        class Tell(spotfit.UserCallback):
            mode: spotfit.CheckpointUploadMode = spotfit.CheckpointUploadMode.SYNC
            def f(self, config=spotfit.RunConfig()) -> spotfit.Result: ...
        print(f"{spotfit.get_checkpoint()}", *spotfit.get_all_reported_checkpoints())
    """)
