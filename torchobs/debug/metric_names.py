"""Whether larger or smaller values of a metric are better, by the words of its name.

Words are whole ones, split at everything but letters and digits, and in camel case: ``confidence_acc`` has no ``fid`` in it.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Literal

_FALLING_OF = {
    "losses": "loss losses logloss nll bce ce xent crossentropy perplexity ppl bpb bpc bpd kl kld divergence cost regret hinge",
    "classification": "error errors err mistakes inaccuracy misclassification false fpr fnr fdr brier ece mce "
    "eer hamming impurity",
    "text": "wer cer ter der",
    "regression": "mse rmse mae mape smape wape mase msle rmsle nmse nrmse medae crps residual deviation distance gap",
    "images, audio": "fid kid fvd fad lpips mmd distortion mcd",
    "regions, trajectories": "hausdorff hd95 assd chamfer epe ade fde",
    "behaviour": "hallucination toxicity forgetting drop",
}
"""which the name of a loss made of a rising metric has, too: ``iou_loss``, ``fid_score``"""
_RISING_OF = {
    "likelihoods": "likelihood loglikelihood loglik elbo",
    "classification": "acc accuracy accuracies auc auroc rocauc auprc aupr prauc ap map f1 f2 fbeta fscore fmeasure precision "
    "recall sensitivity specificity tpr tnr ppv npv kappa qwk mcc matthews",
    "text": "bleu sacrebleu rouge meteor chrf cider spice bertscore bleurt comet em fidelity faithfulness",
    "regression, clusters": "r2 corr correlation pearson spearman kendall concordance cindex plcc srcc krcc similarity "
    "silhouette nmi ami ari modularity",
    "images, audio": "psnr ssim msssim inception snr sdr sisdr sisnr pesq stoi mos",
    "regions, retrieval": "dice dsc jaccard iou miou giou ndcg dcg mrr hit hits hitrate",
    "behaviour": "reward rewards return returns success solved win wins winrate profit sharpe",
    "all": "score scores",
}
_FALLING, _RISING = (frozenset(" ".join(of.values()).split()) for of in (_FALLING_OF, _RISING_OF))
_FALLING_PAIRS = {("cross", "entropy"), ("bits", "per")}
_RISING_PAIRS = {
    ("explained", "variance"), ("exact", "match"), ("predictive", "value"), ("true", "positive"), ("true", "negative"),
    ("pass", "rate"), ("pass", "k"), ("pass", "1"), ("pass", "5"), ("pass", "10"), ("pass", "100"), ("r", "squared"),
}  # fmt: skip
_NEGATED = {"log", "likelihood", "loglikelihood", "elbo", "mean", "root", "median", "max", "brier"}
"""What ``neg`` or ``negative`` turns round: ``negative_log_likelihood``, scikit-learn's ``neg_brier_score``"""
_CAMEL = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")


def better(name: str) -> Literal["min", "max"] | None:
    """Return whether smaller or larger values of a metric of this name are better, ``None`` if its words do not tell.

    An error or a loss is to fall, whatever it is of.
    """
    words = _words(name)
    pairs = set(pairwise(words))
    falls = not _FALLING.isdisjoint(words) or not _FALLING_PAIRS.isdisjoint(pairs)
    if not falls and _RISING.isdisjoint(words) and _RISING_PAIRS.isdisjoint(pairs):
        return None
    negated = {other for one, other in pairs if one in {"neg", "negative"}}
    if negated & (_FALLING | _RISING) - _NEGATED:
        return None  # of ``neg_loss`` nobody can tell whether it is a loss turned round or the loss of negative samples
    return "max" if falls == bool(negated & _NEGATED) else "min"


def _words(name: str) -> list[str]:
    """Return the words in lower case: each as a whole, then in parts as camel case has them; without a number at the end, too.

    ``mAP50`` is ``map50``, ``map``, ``m``, ``ap50`` and ``ap``: nobody can tell a unit's capitals from a new word's.
    """
    words: list[str] = []
    for whole in re.findall(r"[^\W_]+", name):
        parts = _CAMEL.findall(whole)
        for word in [whole] if len(parts) == 1 else [whole, *parts]:
            words += dict.fromkeys((word.lower(), word.lower().rstrip("0123456789") or word))
    return words
