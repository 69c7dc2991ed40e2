// The update rules of the engine's optimizers, each one pass over flat slices, rounded as on a CPU. Values, states and gradients are in
// float; what products are made of may have the type of the module.
#include "packs.cuh"

// What changes from step to step, for some of the values: those from where the step before ends. Steps lie in device memory, so that a
// captured graph can be played again, one after the other; the last one ends with the values.
struct Step {
    // The value that it ends before.
    i64 end;
    // Takes the loss scale out of the gradients.
    float inverse_scale;
    // The learning rate; Adam's is corrected for the start of its first mean.
    float lr;
    // The factor of a value that is added to its gradient; AdamW's is the one that the value itself is multiplied by.
    float decay;
    // How much of the first state stays, and how much of what is new enters it: SGD's momentum, Adam's mean.
    float keep_first;
    float share_first;
    // The same of the squares.
    float keep_second;
    float share_second;
    // What Adam divides the root of the squares by.
    float root;
    float eps;
};

// All values that a rule moves. `copy` is null, or gets the new values in the type of the module. Where `norm` isn't null it is that of
// all gradients, those of other launches among them, which is to be `limit` at most. Where `loss` isn't null and it or the norm is no
// finite number, nothing changes, nor in any step after that has the same `spoilt`, which is 1 from then on: so steps can be given before
// anyone has looked at the losses of those before.
struct Slices {
    float *values;
    const float *grads;
    T *copy;
    const double *norm;
    double limit;
    const float *loss;
    i64 *spoilt;
    i64 n;
};

__device__ inline bool has_finite_norm(const Slices &all) { return !all.norm || *all.norm <= 1.7976931348623157e308; }

// Whether a step changes nothing. All blocks of a launch find the same.
__device__ inline bool is_held_back(const Slices &all) {
    if (!all.loss) return false;
    if (fabsf(*all.loss) < INFINITY_F && has_finite_norm(all)) return *all.spoilt;
    if (blockIdx.x == 0 && threadIdx.x == 0) *all.spoilt = 1;
    return true;
}

// What gradients are multiplied with. Where their norm is no finite number they stay as they are.
__device__ inline float cut_of(const Slices &all) {
    if (!all.norm || !has_finite_norm(all)) return 1.0f;
    // What PyTorch divides by.
    const double factor = all.limit / (*all.norm + 1e-6);
    return factor < 1.0 ? (float)factor : 1.0f;
}

// What a rule keeps for each value. Where there is no memory for one, the rule isn't told anything and nothing is kept.
template <int KEPT> struct States {
    float *of[KEPT];
};

// `rule(s, p, g, kept)` gives what a value p with gradient g becomes, and moves what is kept for it.
template <int KEPT, class Rule> __device__ void move(const Slices &all, const States<KEPT> &states, const Step *step, Rule rule) {
    if (is_held_back(all)) return;
    const float cut = cut_of(all);
    Step s = *step;
    bool even = are_even(all.values, all.grads, all.copy);
    each<KEPT>([&](int k) { even = even && are_even(states.of[k]); });
    by_grid(even, all.n, [&](auto few, i64 i) {
        auto values = taken<few>(all.values + i);
        const auto grads = taken<few>(all.grads + i);
        Pack<few, float> kept[KEPT];
        UNROLL
        for (int k = 0; k < KEPT; k++) kept[k] = taken_or_zeros<few>(states.of[k], i);
        each<few>([&](int j) {
            // A thread's values go up, and so do its steps.
            if (i + j >= s.end) {
                while (i + j >= step->end) step++;
                s = *step;
            }
            float own[KEPT];
            each<KEPT>([&](int k) { own[k] = kept[k].of[j]; });
            values.of[j] = rule(s, values.of[j], grads.of[j] * s.inverse_scale * cut, own);
            each<KEPT>([&](int k) { kept[k].of[j] = own[k]; });
        });
        put(all.values + i, values);
        each<KEPT>([&](int k) {
            if (states.of[k]) put(states.of[k] + i, kept[k]);
        });
        if (all.copy) put(all.copy + i, made<few>([&](int j) { return stored(values.of[j]); }));
    });
}

extern "C" __global__ void sgd(float *values, const float *grads, T *copy, const Step *step, const double *norm, double limit,
                               const float *loss, i64 *spoilt, i64 n) {
    move(Slices{values, grads, copy, norm, limit, loss, spoilt, n}, States<1>{{nullptr}}, step,
         [](const Step &s, float p, float g, float (&)[1]) { return p - s.lr * (g + s.decay * p); });
}

extern "C" __global__ void sgd_momentum(float *values, const float *grads, T *copy, float *momentum, const Step *step, const double *norm,
                                        double limit, const float *loss, i64 *spoilt, i64 n) {
    const Slices all{values, grads, copy, norm, limit, loss, spoilt, n};
    move(all, States<1>{{momentum}}, step, [](const Step &s, float p, float g, float (&kept)[1]) {
        kept[0] = s.keep_first * kept[0] + s.share_first * (g + s.decay * p);
        return p - s.lr * kept[0];
    });
}

extern "C" __global__ void sgd_nesterov(float *values, const float *grads, T *copy, float *momentum, const Step *step, const double *norm,
                                        double limit, const float *loss, i64 *spoilt, i64 n) {
    const Slices all{values, grads, copy, norm, limit, loss, spoilt, n};
    move(all, States<1>{{momentum}}, step, [](const Step &s, float p, float g, float (&kept)[1]) {
        g = g + s.decay * p;
        kept[0] = s.keep_first * kept[0] + s.share_first * g;
        return p - s.lr * (g + s.keep_first * kept[0]);
    });
}

// The step that Adam and AdamW share, of a value and a gradient with their decay; kept are the mean and the squares.
__device__ inline float adam_step(const Step &s, float p, float g, float (&kept)[2]) {
    kept[0] = s.keep_first * kept[0] + s.share_first * g;
    kept[1] = s.keep_second * kept[1] + s.share_second * g * g;
    return p - s.lr * kept[0] / (sqrtf(kept[1]) / s.root + s.eps);
}

extern "C" __global__ void adam(float *values, const float *grads, T *copy, float *mean, float *squares, const Step *step, const double *norm,
                                double limit, const float *loss, i64 *spoilt, i64 n) {
    move(Slices{values, grads, copy, norm, limit, loss, spoilt, n}, States<2>{{mean, squares}}, step,
         [](const Step &s, float p, float g, float (&kept)[2]) { return adam_step(s, p, g + s.decay * p, kept); });
}

extern "C" __global__ void adamw(float *values, const float *grads, T *copy, float *mean, float *squares, const Step *step, const double *norm,
                                 double limit, const float *loss, i64 *spoilt, i64 n) {
    move(Slices{values, grads, copy, norm, limit, loss, spoilt, n}, States<2>{{mean, squares}}, step,
         [](const Step &s, float p, float g, float (&kept)[2]) { return adam_step(s, p * s.decay, g, kept); });
}

// Kept are the mean squares of gradients and of moves.
extern "C" __global__ void adadelta(float *values, const float *grads, T *copy, float *squares, float *moved, const Step *step,
                                    const double *norm, double limit, const float *loss, i64 *spoilt, i64 n) {
    const Slices all{values, grads, copy, norm, limit, loss, spoilt, n};
    move(all, States<2>{{squares, moved}}, step, [](const Step &s, float p, float g, float (&kept)[2]) {
        g = g + s.decay * p;
        const float square = s.keep_second * kept[0] + s.share_second * g * g;
        const float delta = sqrtf(kept[1] + s.eps) / sqrtf(square + s.eps) * g;
        kept[0] = square;
        kept[1] = s.keep_second * kept[1] + s.share_second * delta * delta;
        return p - s.lr * delta;
    });
}

// `momentum` is null without momentum, `mean` where the rule isn't centered.
extern "C" __global__ void rmsprop(float *values, const float *grads, T *copy, float *squares, float *momentum, float *mean, const Step *step,
                                   const double *norm, double limit, const float *loss, i64 *spoilt, i64 n) {
    const bool is_centered = mean != nullptr, has_momentum = momentum != nullptr;
    move(Slices{values, grads, copy, norm, limit, loss, spoilt, n}, States<3>{{squares, momentum, mean}}, step,
         [=](const Step &s, float p, float g, float (&kept)[3]) {
             g = g + s.decay * p;
             kept[0] = s.keep_second * kept[0] + s.share_second * g * g;
             float variance = kept[0];
             if (is_centered) {
                 kept[2] += s.share_second * (g - kept[2]);
                 variance = kept[0] - kept[2] * kept[2];
             }
             float d = g / (sqrtf(variance) + s.eps);
             if (has_momentum) {
                 d = s.keep_first * kept[1] + d;
                 kept[1] = d;
             }
             return p - s.lr * d;
         });
}

// Moves a running mean by its share of the way to the values of now.
extern "C" __global__ void follow(float *mean, const float *values, float share, i64 n) {
    zip(mean, values, mean, n, [=](float old, float now) { return old + share * (now - old); });
}
