"""Edits preserve comments, blank lines, line ends and encodings."""

from __future__ import annotations

from spotfit.migrate.edit import rewrite_script
from tests.unit.migrate.before_and_after import dedent_script, migrated_text


def test_comments_are_preserved_where_their_line_is_removed() -> None:
    assert migrated_text("""
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
    """) == dedent_script("""
        # Copyright
        from spotfit import report  # only this

        def main():
            # two workers and one for the trainer

            # now train
            report({})
            # the end
    """)


def test_blank_lines_between_groups_are_preserved() -> None:
    assert migrated_text("""
        import torch

        import ray
        import ray.train as train
        args = 1

        ray.init()

        train.report({})
    """) == dedent_script("""
        import torch

        import spotfit as train
        args = 1

        train.report({})
    """)


def test_comment_at_the_end_of_a_script_is_preserved() -> None:
    assert migrated_text("import ray\nprint(1)\n# done:\nray.shutdown()\n") == "print(1)\n# done:\n"


def test_line_ends_and_tabs_are_preserved() -> None:
    script = b"import ray.train\r\ndef f():\r\n\tray.train.report({})"
    assert rewrite_script(script).text == b"import spotfit\r\ndef f():\r\n\tspotfit.report({})"


def test_encoding_is_preserved() -> None:
    script = "# -*- coding: latin-1 -*-\nimport ray.train\nname = 'é'\n".encode("latin-1")
    expected = "# -*- coding: latin-1 -*-\nimport spotfit\nname = 'é'\n".encode("latin-1")
    assert rewrite_script(script).text == expected


def test_quotes_of_a_string_are_preserved() -> None:
    assert migrated_text("a = r'''RAY_TRAIN_COLLECTIVE_TIMEOUT_S'''\n") == (
        "a = r'''SPOTFIT_COLLECTIVE_TIMEOUT_S'''\n"
    )


def test_annotations_defaults_and_base_classes_are_rewritten() -> None:
    assert migrated_text("""
        import ray.train
        class Recorder(ray.train.UserCallback):
            mode: ray.train.CheckpointUploadMode = ray.train.CheckpointUploadMode.SYNC
            def f(self, config=ray.train.RunConfig()) -> ray.train.Result: ...
        print(f"{ray.train.get_checkpoint()}", *ray.train.get_all_reported_checkpoints())
    """) == dedent_script("""
        import spotfit
        class Recorder(spotfit.UserCallback):
            mode: spotfit.CheckpointUploadMode = spotfit.CheckpointUploadMode.SYNC
            def f(self, config=spotfit.RunConfig()) -> spotfit.Result: ...
        print(f"{spotfit.get_checkpoint()}", *spotfit.get_all_reported_checkpoints())
    """)
