// The steps of recurrent layers: a thread for each number of a sample's state. Positions and places come first, then samples; gates lie
// side by side in a sample's numbers. Meanings are those of the op table of the engine. Cells are float in any case.
#include "grid.cuh"

__device__ inline float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

// Where the first gate of number i of a state lies among `gates` of each, at a position.
__device__ inline i64 first_gate(i64 i, i64 batch, i64 width, i64 gates, i64 position) {
    const i64 sample = i / width;
    return (position * batch + sample) * gates * width + i - sample * width;
}

extern "C" __global__ void lstm_step(const T *x, const T *product, T *gates, float *cells, T *hidden, i64 batch, i64 width, i64 position,
                                     i64 before, i64 after) {
    const i64 size = batch * width;
    for (i64 i = first_element(); i < size; i += all_threads()) {
        const i64 at = first_gate(i, batch, width, 4, position), own = first_gate(i, batch, width, 4, 0);
        float sums[4];
        for (int k = 0; k < 4; k++) sums[k] = wide(x[at + k * width]) + wide(product[own + k * width]);
        const float in = sigmoid_of(sums[0]), forget = sigmoid_of(sums[1]), made = tanhf(sums[2]), out = sigmoid_of(sums[3]);
        const float cell = forget * cells[before * size + i] + in * made;
        cells[after * size + i] = cell;
        hidden[after * size + i] = stored(out * tanhf(cell));
        gates[at] = stored(in), gates[at + width] = stored(forget);
        gates[at + 2 * width] = stored(made), gates[at + 3 * width] = stored(out);
    }
}

extern "C" __global__ void lstm_step_gradient(const T *gates, const float *cells, const T *grad, const T *later, float *of_cell, T *of_gates,
                                              i64 batch, i64 width, i64 position, i64 before, i64 after) {
    const i64 size = batch * width;
    for (i64 i = first_element(); i < size; i += all_threads()) {
        const i64 at = first_gate(i, batch, width, 4, position);
        const float in = wide(gates[at]), forget = wide(gates[at + width]);
        const float made = wide(gates[at + 2 * width]), out = wide(gates[at + 3 * width]);
        const float of_hidden = wide(grad[after * size + i]) + wide(later[i]), seen = tanhf(cells[after * size + i]);
        const float cell = of_cell[i] + of_hidden * out * (1.0f - seen * seen);
        of_gates[at] = stored(cell * made * in * (1.0f - in));
        of_gates[at + width] = stored(cell * cells[before * size + i] * forget * (1.0f - forget));
        of_gates[at + 2 * width] = stored(cell * in * (1.0f - made * made));
        of_gates[at + 3 * width] = stored(of_hidden * seen * out * (1.0f - out));
        of_cell[i] = cell * forget;
    }
}

extern "C" __global__ void gru_step(const T *x, const T *product, T *gates, T *states, i64 batch, i64 width, i64 position, i64 before,
                                    i64 after) {
    const i64 size = batch * width;
    for (i64 i = first_element(); i < size; i += all_threads()) {
        const i64 from = first_gate(i, batch, width, 3, position), own = first_gate(i, batch, width, 3, 0);
        const i64 at = first_gate(i, batch, width, 4, position);
        const float reset = sigmoid_of(wide(x[from]) + wide(product[own]));
        const float update = sigmoid_of(wide(x[from + width]) + wide(product[own + width]));
        const float part = wide(product[own + 2 * width]), made = tanhf(wide(x[from + 2 * width]) + reset * part);
        states[after * size + i] = stored(made + update * (wide(states[before * size + i]) - made));
        gates[at] = stored(reset), gates[at + width] = stored(update);
        gates[at + 2 * width] = stored(made), gates[at + 3 * width] = stored(part);
    }
}

extern "C" __global__ void gru_step_gradient(const T *gates, const T *states, const T *grad, T *later, T *of_x, T *of_product, i64 batch,
                                             i64 width, i64 position, i64 before, i64 after) {
    const i64 size = batch * width;
    for (i64 i = first_element(); i < size; i += all_threads()) {
        const i64 at = first_gate(i, batch, width, 4, position), to = first_gate(i, batch, width, 3, position);
        const float reset = wide(gates[at]), update = wide(gates[at + width]);
        const float made = wide(gates[at + 2 * width]), part = wide(gates[at + 3 * width]);
        const float of_state = wide(grad[after * size + i]) + wide(later[i]);
        const float of_made = of_state * (1.0f - update) * (1.0f - made * made);
        const float of_reset = of_made * part * reset * (1.0f - reset);
        const float of_update = of_state * (wide(states[before * size + i]) - made) * update * (1.0f - update);
        of_x[to] = of_product[to] = stored(of_reset);
        of_x[to + width] = of_product[to + width] = stored(of_update);
        of_x[to + 2 * width] = stored(of_made), of_product[to + 2 * width] = stored(of_made * reset);
        later[i] = stored(of_state * update);
    }
}
