"""Write checkpoints whole.

Owns where [`~transformers.Trainer`] writes a checkpoint. Invariant: a folder `checkpoint-N` is whole,
however the run ends, because it is written elsewhere and renamed. Older ones are deleted after that.
"""

import os
import shutil
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from trl_integration.interrupts import interrupted_afterwards

_UNFINISHED = "_unfinished"  # in the output folder; uploads to the Hub leave out `_*`


class WholeCheckpoints(Trainer):
    """[`~transformers.Trainer`] that writes each checkpoint under another name and renames it."""

    _is_saving = False

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, _UNFINISHED) if self._is_saving else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = self._get_output_dir(trial)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with interrupted_afterwards():
            self._remove_unfinished(folder)  # of a run that was killed
            self.accelerator.wait_for_everyone()
            self._is_saving = True
            try:
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                self._put_in_place(folder, name)
            finally:
                self._is_saving = False
                self._remove_unfinished(folder)
            self.accelerator.wait_for_everyone()
            if self.args.push_to_hub:
                self._push_from_checkpoint(os.path.join(folder, name))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._is_saving:  # the upload reads the folder for a while: not before it is renamed
            super()._push_from_checkpoint(checkpoint_folder)

    def _put_in_place(self, folder: str, name: str) -> None:
        written, place = os.path.join(folder, _UNFINISHED, name), os.path.join(folder, name)
        is_best = self.state.best_model_checkpoint == written
        if is_best:
            self.state.best_model_checkpoint = place
        if not self.args.should_save:
            return
        if is_best:
            self.state.save_to_json(os.path.join(written, TRAINER_STATE_NAME))
        if os.path.exists(place):  # the same step was saved before
            os.rename(place, f"{written}-replaced")
        os.rename(written, place)
        rotate_checkpoints(
            output_dir=folder,
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _remove_unfinished(self, folder: str) -> None:
        if self.args.should_save:
            shutil.rmtree(os.path.join(folder, _UNFINISHED), ignore_errors=True)
