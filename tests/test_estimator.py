import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from torchcaps.estimator import CapsNetClassifier

SMALL = {"conv_channels": 8, "primary_capsules": 4, "threads": 1}
NOT_FOR_IMAGES = {
    "check_classifiers_train": "its rows are two or a few numbers of a cluster, no images: too little to reach 83 %"
}


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    return load_digits(return_X_y=True)


def test_it_learns_digits(digits):
    X, y = digits
    model = CapsNetClassifier(epochs=6, **SMALL).fit(X[:600], y[:600])
    assert model.score(X[600:900], y[600:900]) > 0.8
    shares = model.predict_proba(X[:5])
    assert shares.shape == (5, 10)
    np.testing.assert_allclose(shares.sum(1), 1)
    assert (model.predict(X[:5]) == model.classes_[shares.argmax(1)]).all()


def test_classes_may_have_any_names(digits):
    X, y = digits
    few = np.isin(y, [3, 8])
    names = np.where(y[few] == 3, "three", "eight")
    model = CapsNetClassifier(epochs=3, **SMALL).fit(X[few][:60], names[:60])
    assert set(model.predict(X[few][60:80])) <= {"three", "eight"}


def test_it_fits_into_a_pipeline_and_a_grid_search(digits):
    X, y = digits
    pipeline = make_pipeline(MinMaxScaler(), CapsNetClassifier(epochs=1, **SMALL))
    search = GridSearchCV(pipeline, {"capsnetclassifier__routing": ["l2", "uniform"]}, cv=2)
    search.fit(X[:80], y[:80])
    assert search.best_params_["capsnetclassifier__routing"] in ("l2", "uniform")


def test_the_same_random_state_gives_the_same_answers(digits):
    X, y = digits
    model = CapsNetClassifier(epochs=1, **SMALL)
    first, second = (clone(model).fit(X[:100], y[:100]).predict_proba(X[:10]) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_numbers_of_numpy_and_no_random_state_are_taken(digits):
    X, y = digits
    model = CapsNetClassifier(epochs=np.int64(1), random_state=None, **SMALL)
    assert model.fit(X[:50], y[:50]).predict(X[:5]).shape == (5,)


def test_colour_images_have_a_shape(digits):
    X = np.random.default_rng(0).random((20, 3 * 18 * 20))
    y = np.arange(20) % 2
    model = CapsNetClassifier((3, 18, 20), epochs=1, **SMALL).fit(X, y)
    assert model.network_.image_shape == (3, 18, 20)
    with pytest.raises(ValueError, match="does not have the 1080 pixels"):
        CapsNetClassifier((5, 5), epochs=1, **SMALL).fit(X, y)


@parametrize_with_checks(
    [CapsNetClassifier(conv_channels=4, primary_capsules=2, epochs=1, threads=1)],
    expected_failed_checks=lambda estimator: NOT_FOR_IMAGES,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)
