"""The everyday verbs of a model: one method a task, each of which returns numbers with their picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from llmgeom.progress import watched

if TYPE_CHECKING:
    from llmgeom.batch import Prompts
    from llmgeom.probes.labels.fitted import Probe
    from llmgeom.verbs.beliefs import Beliefs
    from llmgeom.verbs.reading import Reading
    from llmgeom.verbs.steering import Generated
    from llmgeom.verbs.transport import Transport


class Verbs:
    """What `llmgeom.load` returns has these methods. Edits of the model (`edit`, `steer`) are made in all of them."""

    name: str
    edit: Callable[..., Self]

    def lens(
        self, prompts: Prompts, controls: int = 0, seed: int = 0, transport: str | Transport | None = None
    ) -> Reading:
        """The logit lens: what each layer's residual stream predicts (nostalgebraist 2020).

        Row 0 is the input of the first layer, row l the output of layer l - 1; the last row is the model's own answer.

        Args:
            prompts: One, a string or its token ids, is read at every position; several at their last token.
            controls: Of several prompts: how many untrained copies, and shuffles of each prompt's tokens, make a band.
            seed: Of the controls.
            transport: A Jacobian lens, of `fit_lens` or a published file: its matrices carry the stream to the last
                layer before it is unembedded (Gurnee et al. 2026), at the layers that have one. Each array stands a
                second time, as "Jacobian KL" and so on, with the same bands.

        Returns:
            Of one prompt, over layer and position: `probability` of the top `token`; `rank` of the token that the model
            itself ends in, 1 for the top; `entropy` in bits; `KL` from the final distribution to this one, in bits.
            Of several, over layer: means of `entropy` and `KL`, and `decided`, the share of prompts whose answer is on
            top in this layer and all later ones, with 95 % intervals over prompts and the range of each control's
            draws; in `attrs` the mean first layer from which the answer stays on top.

        Raises:
            Unavailable: How this model goes from its residual stream to logits is not known.
        """
        from llmgeom.verbs.lens import lens

        with watched():
            return lens(self, prompts, controls, seed, transport)

    def fit_lens(self, prompts: Prompts, rows: int | None = None, skip: int = 16) -> Transport:
        """Fit a Jacobian lens: the average Jacobian of the last layer's output by each earlier layer's, by autograd.

        J_l = mean over prompts and positions t of the sum over t' >= t of dh_L(t') / dh_l(t) (Gurnee et al. 2026). One
        backward pass gives one row of every layer's matrix: a prompt costs d_model of them, which is why `rows` spreads
        the rows over prompts, an unbiased estimate with more error.

        Args:
            prompts: Texts of the kind that the lens will read.
            rows: How many rows of the matrices a prompt measures; all by default.
            skip: The first positions of a text, left out as the attention sink is; so is the last one.

        Returns:
            For `lens(transport=...)`; `attrs["error"]` is the standard error by layer, relative to the matrix, and
            `save(path)` writes it.

        Raises:
            UserError: Fewer than two prompts for each row; a prompt of skip + 1 tokens or fewer.
        """
        from llmgeom.verbs.transport import fit

        with watched():
            return fit(self, prompts, rows, skip)

    def attention(self, prompt: Prompts, layer: int, head: int) -> Reading:
        """The attention pattern of one head on one prompt: `attention` over query and key position; rows sum to 1.

        Args:
            prompt: A string, or its token ids.
            layer, head: Which; a query head.
        """
        from llmgeom.verbs.lens import attention

        return attention(self, prompt, layer, head)

    def heads(self, length: int = 50, sequences: int = 8, controls: int = 0, seed: int = 0) -> Reading:
        """Scores of every query head on random tokens that are repeated once (Olsson et al. 2022).

        A score is the mean attention weight over the queries of the second half, at place t, with period `length`:
        on t - length + 1, the token after the earlier copy ("induction"); on t - 1 ("previous token"); on t - length,
        the earlier copy ("duplicate token"); on place 0 ("first token"). "error of ..." is the standard error over
        sequences. Attention that is spread evenly scores `attrs["even attention"]`. "copying" is of the weights alone:
        the sum of the eigenvalues of the head's OV circuit over that of their sizes, -1 to 1 (Elhage et al. 2021).

        Args:
            length: Tokens before they repeat. They all differ.
            sequences: How many.
            controls: Untrained copies: `attrs["untrained copies"]` has the least and the largest score of all their
                heads.
            seed: Of the random tokens, and of the copies.

        Returns:
            Over layer and head.
        """
        from llmgeom.verbs.heads import heads

        with watched():
            return heads(self, length, sequences, controls, seed)

    def copying(
        self, heads: Sequence[tuple[int, int]], length: int = 50, sequences: int = 8, draws: int = 8, seed: int = 0
    ) -> Reading:
        """What in-context copying loses without some heads: random tokens, repeated once (Olsson et al. 2022).

        The heads' outputs z become their means over all positions (mean ablation), at every position.

        Args:
            heads: Pairs (layer, head).
            length, sequences: As in `heads`.
            draws: Random sets of as many other heads of the same layers, as a control; of any layer where a layer
                has too few.
            seed: Of tokens and random heads.

        Returns:
            Over edits (none, these heads, each random set): `lost`, the mean log-probability of a repeated token
            without the edit less with it, in nats, with its 95 % interval over sequences. In `attrs` what the tokens
            had the first time, without the edit: heads that do all of the copying bring a token back to it.
        """
        from llmgeom.verbs.heads import copying

        with watched():
            return copying(self, heads, length, sequences, draws, seed)

    def patch(
        self,
        clean: Prompts,
        corrupt: Prompts,
        answers: Sequence[Any],
        *,
        at: str = "residual",
        attribution: bool = False,
        metric: str | Callable[..., Any] = "logit difference",
        to: tuple[int, int, str] | None = None,
    ) -> Reading:
        """Activation patching, layer by position or by head (Meng et al. 2022; denoising).

        The corrupt prompt is read once for each place, where one activation is replaced by that of the clean prompt.
        All places of a layer run in one batch. Exchange clean and corrupt, and answers, to patch the other way
        (noising).

        Args:
            clean, corrupt: Two prompts with the same number of tokens; or two lists of as many, all of one length.
            answers: The clean prompt's answer and the corrupt one's: a token's text with its space, or its id. Of many
                pairs, a list of such pairs, or one for all.
            at: "residual", the input of a layer; "attn_out" or "mlp_out", what a layer's attention or MLP adds;
                "heads", each query head's output at all positions at once; "edges", each head's direct path to the
                reader in `to` (path patching; Wang et al. 2022).
            attribution: Attribution patching (Nanda 2023) instead: every place from one pass and its gradients, to
                first order. It ranks places; of those that matter, patch some exactly.
            metric: "logit difference" of the two answers, "log-probability" of the first, or a function of
                log-probabilities [prompt vocabulary] that returns one number a prompt, differentiable for attribution.
            to: With "edges": (layer, head, "query", "key" or "value") that reads; by default the answer's logits.

        Returns:
            Over layer and position, or head: the metric at the last token (in nats, unless it is a function), and
            `restored`, 0 for the corrupt prompt's and 1 for the clean one's. `attrs` has both ends. Of many pairs means
            with 95 % intervals over pairs, and as a control `restored by another pair's prompt`, the next clean one.

        Raises:
            UserError: The prompts differ in length or are equal; an answer is not one token.
        """
        from llmgeom.verbs.patching import patch

        with watched():
            return patch(self, clean, corrupt, answers, at, attribution, metric, to)

    def beliefs(
        self,
        world: Any = "edge-hmm",
        sequences: int = 16,
        length: int = 512,
        rendering: str = "spaces",
        controls: int = 2,
        seed: int = 0,
    ) -> Beliefs:
        """Beliefs in context: is the exact belief about a process in the residual stream, beyond what readers of a few
        symbols know, and does the answer use it?

        Long sequences of a world are written as text with tokens that the seed decides; a model without a tokenizer (a
        wind tunnel) reads the symbols. Where symbols are predicted, in the second half, the exact belief is read out by
        ridge regression, held out by sequence. Rivals on the same rows and folds: the belief of one who knows the last
        k symbols only (k = 1 to 6), counts of order 0 to 3 in the context, six exponential filters of the symbols.

        Args:
            world: A world that shows a symbol a step, or its spec: "edge-hmm" is Mess3, "edge-hmm:process=rrxor",
                "edge-hmm:stay=0.97,emit=0.6", FILE:CLASS; where no state is hidden ("markov:symbols=3") the belief is
                the exact distribution of the next symbol. Of several in a list, each sequence follows one.
            sequences, length: How many sequences, and symbols in each.
            rendering: Letters with "spaces", "commas" or "lines" between; "words"; "anew", letters that are drawn anew
                for each sequence.
            controls: Untrained copies, whose range over draws is a band; with any also sequences in shuffled order
                (with the belief that their symbols give) and mean-ablated attention.
            seed: Of sequences, letters and copies.

        Returns:
            Over layer: `R2` of the belief; `R2 beyond best rival` and `R2 beyond all rivals`, partial: of what they
            leave of the belief, from what they leave of the stream; each with its 95 % interval over sequences; the
            controls. `rivals` has their R2. `answers`, over position: bits of KL from the exact next symbol, beside
            counters, and of several worlds beside one who knows that it is one of them; resolution, weight of evidence,
            R2. `used`: how far patches and steps along the belief move the answer. `simplex()` draws the beliefs.

        Raises:
            UserError: The world shows more than symbols, or the model reads fewer tokens.
        """
        from llmgeom.verbs.beliefs import beliefs

        with watched():
            return beliefs(self, world, sequences, length, rendering, controls, seed)

    def probe(
        self,
        texts: Sequence[Any],
        labels: Sequence[Any],
        clusters: Sequence[Any] | None = None,
        **options: Any,
    ) -> Probe:
        """Where a label of yours is linearly readable, and its direction: `llmgeom probe` as an object.

        Ridge regression at the last token of each text, scored on held-out clusters, beside untrained copies, shuffled
        words, no context, a bag of tokens and permuted labels.

        Args:
            texts: At least 5 of each class; or chats, lists of messages with `role` and `content`.
            labels: Two or more classes, or numbers.
            clusters: Texts of one cluster (template, document, author) stay in one fold; by default each is its own.
            options: Of `Probe`: site, layers, position, confounds, controls, seed.

        Returns:
            The score over layers, with intervals and the band of all controls; `layer`, `direction`, `intercept`,
            `predict`, `predict_proba`, `score`, `save`.

        Raises:
            UserError: Too few texts of a class; numbers of texts and labels that differ.
        """
        from llmgeom.probes.labels.fitted import Probe

        subject: Any = self
        with watched():
            return Probe(subject, **options).fit(texts, labels, clusters)

    def steer(self, direction: Any, dose: float, layer: int | None = None, positions: Any = "all") -> Self:
        """The model with `dose` times a direction added to the input of one layer, in every pass: `generate` too.

        Args:
            direction: A label probe, whose direction has length 1 and a layer of its own; or [d_model] numbers.
            dose: How many times the direction; `4 * probe.spread` is four standard deviations of its activations.
            layer: Whose input, 0 to the last; negative from the end.
            positions: Where, as in `edit`.

        Raises:
            UserError: The direction has another width, no layer is given, or it does not exist.
        """
        from llmgeom.verbs.steering import added, place

        vector, layer, site = place(direction, layer)
        function, spec = added(self, vector, dose)
        return self.edit(site, function, layers=layer, positions=positions, spec=spec)

    def dose_curve(
        self,
        prompts: Prompts,
        answers: Sequence[str | int],
        direction: Any,
        layer: int | None = None,
        doses: Sequence[float] = (-2.0, -1.0, 1.0, 2.0),
        draws: int = 8,
        seed: int = 0,
    ) -> Reading:
        """Is a direction used? Log odds of two answers under doses of it, as `steer` adds it at every position.

        Beside it are random directions of the same norm, and of the same variance: scaled so that the residual streams
        of these prompts vary along them as much as along the direction (of which most random directions have less).

        Args:
            prompts: Whose next token is read.
            answers: Two tokens, each as its text with its space, or its id.
            direction, layer: As in `steer`.
            doses: How many times the direction; 0 is added.
            draws: Random directions of each kind.
            seed: Of them.

        Returns:
            Over dose: `log odds` in nats, mean over prompts, with its 95 % interval; the range of the means of each
            kind of random directions.

        Raises:
            UserError: An answer is not one token; no such layer; a direction of another width.
        """
        from llmgeom.verbs.steering import dose_curve

        with watched():
            return dose_curve(self, prompts, answers, direction, layer, doses, draws, seed)

    def generate(self, prompt: Prompts, tokens: int = 20, temperature: float = 0.0, seed: int = 0) -> Generated:
        """What the model writes after a prompt, with its edits.

        Every token reads the whole text again, so that an edit acts at each position as it does in `capture`: of n new
        tokens, n passes. It ends at the tokenizer's end-of-text token.

        Args:
            prompt: A string, or its token ids.
            tokens: The most that are written.
            temperature: 0 takes the likeliest token; above, tokens are drawn.
            seed: Of the draws.

        Returns:
            The new text alone; its `tokens` are the ids.
        """
        from llmgeom.verbs.steering import generate

        return generate(self, prompt, tokens, temperature, seed)
