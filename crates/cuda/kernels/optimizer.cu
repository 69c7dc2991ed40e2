// The update rules of the engine's optimizers, each one pass over flat slices, rounded as on a CPU. Values and states are in
// float, gradients in the type of the module.
#include "grid.cuh"

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

// All values that a rule moves. `found` is null, or not 0 where a gradient was no finite number: then nothing changes. `copy`
// is null, or gets the new values in the type of the gradients.
struct Slices {
    float *values;
    const T *grads;
    T *copy;
    const int *found;
    i64 n;
};

template <class Rule> __device__ void move(const Slices &all, const Step *step, Rule rule) {
    if (all.found && *all.found) return;
    Step s = *step;
    for (i64 i = first_element(); i < all.n; i += all_threads()) {
        // A thread's values go up, and so do its steps.
        if (i >= s.end) {
            while (i >= step->end) step++;
            s = *step;
        }
        const float value = rule(s, i, all.values[i], wide(all.grads[i]) * s.inverse_scale);
        all.values[i] = value;
        if (all.copy) all.copy[i] = stored(value);
    }
}

extern "C" __global__ void sgd(float *values, const T *grads, T *copy, const Step *step, const int *found, i64 n) {
    move(Slices{values, grads, copy, found, n}, step,
         [](const Step &s, i64, float p, float g) { return p - s.lr * (g + s.decay * p); });
}

extern "C" __global__ void sgd_momentum(float *values, const T *grads, T *copy, float *momentum, const Step *step, const int *found,
                                        i64 n) {
    move(Slices{values, grads, copy, found, n}, step, [=](const Step &s, i64 i, float p, float g) {
        const float d = s.keep_first * momentum[i] + s.share_first * (g + s.decay * p);
        momentum[i] = d;
        return p - s.lr * d;
    });
}

extern "C" __global__ void sgd_nesterov(float *values, const T *grads, T *copy, float *momentum, const Step *step, const int *found,
                                        i64 n) {
    move(Slices{values, grads, copy, found, n}, step, [=](const Step &s, i64 i, float p, float g) {
        g = g + s.decay * p;
        const float d = s.keep_first * momentum[i] + s.share_first * g;
        momentum[i] = d;
        return p - s.lr * (g + s.keep_first * d);
    });
}

// The step that Adam and AdamW share, of a value and a gradient with their decay.
__device__ inline float adam_step(const Step &s, float p, float g, float &mean, float &squares) {
    mean = s.keep_first * mean + s.share_first * g;
    squares = s.keep_second * squares + s.share_second * g * g;
    return p - s.lr * mean / (sqrtf(squares) / s.root + s.eps);
}

extern "C" __global__ void adam(float *values, const T *grads, T *copy, float *mean, float *squares, const Step *step,
                                const int *found, i64 n) {
    move(Slices{values, grads, copy, found, n}, step, [=](const Step &s, i64 i, float p, float g) {
        return adam_step(s, p, g + s.decay * p, mean[i], squares[i]);
    });
}

extern "C" __global__ void adamw(float *values, const T *grads, T *copy, float *mean, float *squares, const Step *step,
                                 const int *found, i64 n) {
    move(Slices{values, grads, copy, found, n}, step, [=](const Step &s, i64 i, float p, float g) {
        return adam_step(s, p * s.decay, g, mean[i], squares[i]);
    });
}

extern "C" __global__ void adadelta(float *values, const T *grads, T *copy, float *squares, float *moved, const Step *step,
                                    const int *found, i64 n) {
    move(Slices{values, grads, copy, found, n}, step, [=](const Step &s, i64 i, float p, float g) {
        g = g + s.decay * p;
        const float square = s.keep_second * squares[i] + s.share_second * g * g;
        const float delta = sqrtf(moved[i] + s.eps) / sqrtf(square + s.eps) * g;
        squares[i] = square;
        moved[i] = s.keep_second * moved[i] + s.share_second * delta * delta;
        return p - s.lr * delta;
    });
}

// `momentum` is null without momentum, `mean` where the rule isn't centered.
extern "C" __global__ void rmsprop(float *values, const T *grads, T *copy, float *squares, float *momentum, float *mean,
                                   const Step *step, const int *found, i64 n) {
    move(Slices{values, grads, copy, found, n}, step, [=](const Step &s, i64 i, float p, float g) {
        g = g + s.decay * p;
        const float square = s.keep_second * squares[i] + s.share_second * g * g;
        squares[i] = square;
        float variance = square;
        if (mean) {
            mean[i] += s.share_second * (g - mean[i]);
            variance = square - mean[i] * mean[i];
        }
        float d = g / (sqrtf(variance) + s.eps);
        if (momentum) {
            d = s.keep_first * momentum[i] + d;
            momentum[i] = d;
        }
        return p - s.lr * d;
    });
}

// Moves a running mean by its share of the way to the values of now.
extern "C" __global__ void follow(float *mean, const float *values, float share, i64 n) {
    for (i64 i = first_element(); i < n; i += all_threads()) mean[i] = mean[i] + share * (values[i] - mean[i]);
}
