"""Lightning's Trainer with `strategy="ddp"`, as written for one process per task, which resumes from its checkpoint.

With `--elastic`: by ElasticStrategy and ElasticDataLoader, without checkpoints.
"""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from steps import finish, note
from torch.utils.data import DataLoader, TensorDataset
from toy import make_net, make_rows, weigh

elastic = "--elastic" in sys.argv


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, index):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, *_):
        note(self.global_step)


rows = TensorDataset(*make_rows())
options = {"accelerator": "cpu", "max_epochs": 4, "logger": False}
options |= {"enable_progress_bar": False, "enable_model_summary": False}
net = Net()
if elastic:
    from spark_elastic.torch.elastic import ElasticDataLoader
    from spark_elastic.torch.lightning import ElasticStrategy

    trainer = pl.Trainer(strategy=ElasticStrategy(), enable_checkpointing=False, **options)
    trainer.fit(net, ElasticDataLoader(rows, 32))
else:
    often = {"every_n_train_steps": 5, "save_last": True, "enable_version_counter": False}
    saver = ModelCheckpoint("checkpoints", **often)
    trainer = pl.Trainer(strategy="ddp", devices=2, callbacks=[saver], **options)
    last = Path("checkpoints/last.ckpt")
    trainer.fit(net, DataLoader(rows, 16), ckpt_path=last if last.exists() else None)
finish(weigh(net))
