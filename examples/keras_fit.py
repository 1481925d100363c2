"""Trains on handwritten digits with Keras: on the full batch, in micro-batches, and with Keras's own accumulation.

Runs on every backend: KERAS_BACKEND=tensorflow, jax or torch.
"""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from bigbatch.keras import accumulate

BATCH_SIZE = 384
MICRO_BATCH_SIZE = 32
EPOCHS = 15

images, classes = load_digits(return_X_y=True)
x = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
held_out = np.random.default_rng(0).random(len(x)) < 1 / 6
x_train, y_train, x_test, y_test = x[~held_out], classes[~held_out], x[held_out], classes[held_out]


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)), layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"), layers.Flatten(), layers.Dense(10),
        ]
    )  # fmt: skip


def fit(model: keras.Model, batch_size: int, **options: int) -> list[float]:
    """Trains, and returns the loss of each epoch. The last batch is smaller and does not divide evenly."""
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0, **options),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model.fit(x_train, y_train, batch_size=batch_size, epochs=EPOCHS, shuffle=False, verbose=0).history["loss"]


def gap(ours: keras.Model, full: keras.Model) -> float:
    """The largest relative difference of the weights from those of the full batch."""
    pairs = zip(ours.get_weights(), full.get_weights(), strict=True)
    return float(max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs))


full, ours, theirs = make_model(), make_model(), make_model()
full_losses = fit(full, BATCH_SIZE)
our_losses = fit(accumulate(ours, MICRO_BATCH_SIZE), BATCH_SIZE)
their_losses = fit(theirs, MICRO_BATCH_SIZE, gradient_accumulation_steps=BATCH_SIZE // MICRO_BATCH_SIZE)

print(f"Keras on {keras.backend.backend()}, batch of {BATCH_SIZE}, in micro-batches of {MICRO_BATCH_SIZE}")
print("epoch   full batch   bigbatch   gradient_accumulation_steps")
for epoch, losses in enumerate(zip(full_losses, our_losses, their_losses, strict=True), 1):
    print("{:5}   {:10.6f} {:10.6f}   {:10.6f}".format(epoch, *losses))
print(f"weights of bigbatch: {gap(ours, full):.1e} from the full batch's")
print(f"weights of gradient_accumulation_steps: {gap(theirs, full):.1e}")
print(f"accuracy on held-out digits: {ours.evaluate(x_test, y_test, verbose=0)[1]:.1%}")
