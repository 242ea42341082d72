import torch

from sharded_ckpt import Keep, SaveEvery, ShardedCheckpointer

model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())
policies = {"save_every": SaveEvery(steps=5), "keep": Keep(last=2)}
with ShardedCheckpointer(model, "runs/quickstart", optimizer=optimizer, **policies) as ckpt:
    for step in range(ckpt.load().step + 1, 21):  # 0 in a fresh directory
        loss = (model(torch.randn(8, 256)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if ckpt.should_save(step):
            ckpt.save(step, metrics={"loss": loss.item()})  # returns at once
    ckpt.wait()
    print("newest committed step:", ckpt.latest_step())
