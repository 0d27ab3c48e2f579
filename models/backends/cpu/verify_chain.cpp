// Where a line of drafts ends, and a walk down it along the target's best tokens, for CPUs: what `models.backends.cpu.verify_chain`
// compiles, behind `vectors.h`, and calls.

extern "C" {

// A row's nodes are looked at in order, and none beyond the first that leads off the line.
// `sizes`: rows, nodes N, vocabulary V, and the strides of `tokens` and `valid` by row and node. `logits` (rows, N, V)
// are dense; outputs (rows, N), or (rows,), are dense too, and zero behind the walk's end.
void walk_line(const float* logits, const int64_t* tokens, const uint8_t* valid, const int64_t* sizes, int64_t* path,
               int64_t* counts, int64_t* own, int64_t* said, float* logprobs, int num_threads) {
    const int64_t num_rows = sizes[0], num_nodes = sizes[1], vocabulary = sizes[2];
#pragma omp parallel for num_threads(num_threads) if (num_rows * num_nodes * vocabulary > PARALLEL_NUMBERS)
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t node = 0; node < num_nodes; node++) {
            const int64_t here = row * num_nodes + node;
            const float* scores = logits + here * vocabulary;
            // What is no number, or lies beyond all numbers, is the best; of equal ones the first is.
            Floats most = spread(NOTHING);
            Ints is_odd = {};
            int64_t at = 0;
            for (; at + WIDTH <= vocabulary; at += WIDTH) {
                Floats some = load(scores + at);
                is_odd |= (Ints)(some != some);
                most = pick((Ints)(some > most), some, most);
            }
            float best = largest(most);
            bool has_odd = false;
            int32_t odd[WIDTH];
            std::memcpy(odd, &is_odd, sizeof odd);
            for (int i = 0; i < WIDTH; i++) has_odd = has_odd || odd[i] != 0;
            for (; at < vocabulary; at++) {
                has_odd = has_odd || scores[at] != scores[at];
                best = std::max(best, scores[at]);
            }
            int64_t choice = 0;
            if (has_odd)
                while (scores[choice] == scores[choice]) choice++;
            else
                while (scores[choice] != best) choice++;
            float logprob = std::numeric_limits<float>::quiet_NaN();
            if (!has_odd && std::isfinite(best)) {
                Floats parts = {};
                int64_t k = 0;
                for (; k + WIDTH <= vocabulary; k += WIDTH) parts += exponential(load(scores + k) - best);
                float total = sum(parts);
                for (; k < vocabulary; k++) total += std::exp(scores[k] - best);
                logprob = -std::log(total);
            }
            path[here] = node;
            said[here] = choice;
            logprobs[here] = logprob;
            counts[row] = node + 1;
            own[row] = choice;
            const bool goes_on = node + 1 < num_nodes && valid[row * sizes[5] + (node + 1) * sizes[6]] &&
                                 tokens[row * sizes[3] + (node + 1) * sizes[4]] == choice;
            if (!goes_on) {
                for (int64_t i = here + 1; i < (row + 1) * num_nodes; i++) path[i] = said[i] = 0, logprobs[i] = 0.0f;
                break;
            }
        }
    }
}

// Where lines end: `best` (rows, nodes) is dense, `depths` are `stride` numbers apart; `valid` (rows, nodes), and how many
// drafts and whether one is no number (rows,), are dense too.
void cut_line(const float* best, const int64_t* depths, int64_t num_rows, int64_t num_nodes, int64_t stride,
              uint8_t* valid, int64_t* num_drafted, uint8_t* has_failed) {
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t num_drafts = 0;
        bool goes_on = true, failed = false;
        for (int64_t node = 0; node < num_nodes; node++) {
            const float score = best[row * num_nodes + node];
            failed = failed || !(score < std::numeric_limits<float>::infinity());
            goes_on = goes_on && std::isfinite(score) && node <= depths[row * stride];
            // The root is no draft.
            valid[row * num_nodes + node] = node == 0 || goes_on;
            num_drafts += node > 0 && goes_on;
        }
        num_drafted[row] = num_drafts;
        has_failed[row] = failed;
    }
}
}
