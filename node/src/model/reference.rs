//! The layers in plain f64 loops, from the formulas: what the tests compare with.

use skein_protocol::model::{ModelConfig, Structure};
use tch::{Kind, TchError, Tensor};

/// A small model: two query heads to a key head.
pub(crate) fn model() -> ModelConfig {
    ModelConfig {
        vocab_size: 11,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 32,
        rms_norm_eps: 1e-5,
        rope_theta: 100.0,
        tie_word_embeddings: false,
        initializer_range: 0.02,
    }
}

/// Reproducible numbers in -1..1.
pub(crate) fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Weights of one layer and their shapes, in the layout's order.
pub(crate) fn layer_weights(config: &ModelConfig) -> (Vec<Vec<f32>>, Vec<Vec<i64>>) {
    let structure = Structure::llama(config, 8);
    let tensors = &structure.groups[1].tensors;
    let weights = tensors.iter().enumerate().map(|(index, spec)| numbers(100 + index as u64, spec.len())).collect();
    (weights, tensors.iter().map(|spec| spec.shape.iter().map(|d| *d as i64).collect()).collect())
}

/// The values of a tensor.
pub(crate) fn values(tensor: &Tensor) -> Vec<f32> {
    let flat = tensor.detach().contiguous().view([-1]);
    Vec::try_from(&flat).expect("f32 values")
}

/// Fails unless all are equal to `tolerance`, relative to the largest.
pub(crate) fn close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    let scale = expected.iter().fold(1.0f64, |max, value| max.max(value.abs()));
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((f64::from(*got) - expected).abs() <= tolerance * scale, "value {index}: got {got}, expected {expected}");
    }
}

/// Compares a layer with its formula: the output, and by central differences of the formula in f64
/// every gradient of a weighted sum of the output.
pub(crate) fn check_layer(
    inputs: &[Vec<f32>],
    shapes: &[&[i64]],
    layer: impl Fn(&[Tensor]) -> Result<Tensor, TchError>,
    formula: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    tch::set_num_threads(1);
    let tensors: Vec<Tensor> = inputs.iter().zip(shapes).map(|(values, shape)| Tensor::from_slice(values).view(*shape).set_requires_grad(true)).collect();
    let output = layer(&tensors).expect("shapes fit");
    let mut wide: Vec<Vec<f64>> = inputs.iter().map(|values| values.iter().map(|value| f64::from(*value)).collect()).collect();
    let expected = formula(&wide);
    close(&values(&output), &expected, 1e-5);

    let weights = numbers(77, expected.len());
    let seed = Tensor::from_slice(&weights).view(output.size().as_slice());
    let gradients = Tensor::run_backward(&[(output * seed).sum(Kind::Float)], &tensors, false, false);
    let weighted = |wide: &[Vec<f64>]| -> f64 { formula(wide).iter().zip(&weights).map(|(y, w)| y * f64::from(*w)).sum() };
    for (which, gradient) in gradients.iter().enumerate() {
        let step = 1e-5;
        let numeric: Vec<f64> = (0..wide[which].len())
            .map(|index| {
                let value = wide[which][index];
                wide[which][index] = value + step;
                let above = weighted(&wide);
                wide[which][index] = value - step;
                let below = weighted(&wide);
                wide[which][index] = value;
                (above - below) / (2.0 * step)
            })
            .collect();
        close(&values(gradient), &numeric, 2e-5);
    }
}

/// `x W^T` of rows of `width` values.
pub(crate) fn linear(x: &[f64], weight: &[f64], width: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
    x.chunks(width).flat_map(|row| weight.chunks(width).map(move |column| dot(row, column))).collect()
}

/// Root mean square norm of rows as wide as `weight`.
pub(crate) fn rms_norm(x: &[f64], weight: &[f64], epsilon: f64) -> Vec<f64> {
    let scale = |row: &[f64]| 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64 + epsilon).sqrt();
    x.chunks(weight.len()).flat_map(|row| row.iter().zip(weight).map(move |(v, w)| v * scale(row) * w)).collect()
}

/// Turns `[sequences, length, heads, width]`: `x * cos + rotate_half(x) * sin`.
pub(crate) fn rope(x: &[f64], length: usize, heads: usize, width: usize, theta: f64) -> Vec<f64> {
    let half = width / 2;
    let mut out = vec![0.0; x.len()];
    for (index, (head, out)) in x.chunks(width).zip(out.chunks_mut(width)).enumerate() {
        let position = (index / heads % length) as f64;
        for i in 0..half {
            let angle = position / theta.powf(2.0 * i as f64 / width as f64);
            out[i] = head[i] * angle.cos() - head[i + half] * angle.sin();
            out[i + half] = head[i + half] * angle.cos() + head[i] * angle.sin();
        }
    }
    out
}

/// Causal attention with the projections of queries, keys, values and the output.
pub(crate) fn attention(x: &[f64], [query, key, value, output]: [&Vec<f64>; 4], config: &ModelConfig, length: usize) -> Vec<f64> {
    let (hidden, heads, groups, width) = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim());
    let q = rope(&linear(x, query, hidden), length, heads, width, config.rope_theta);
    let k = rope(&linear(x, key, hidden), length, groups, width, config.rope_theta);
    let v = linear(x, value, hidden);
    let mut attended = vec![0.0; x.len()];
    for sequence in 0..x.len() / (length * hidden) {
        for head in 0..heads {
            let group = head / (heads / groups);
            let at = |position: usize, heads: usize, head: usize| ((sequence * length + position) * heads + head) * width;
            for i in 0..length {
                let q = &q[at(i, heads, head)..][..width];
                let score = |j: usize| q.iter().zip(&k[at(j, groups, group)..]).map(|(a, b)| a * b).sum::<f64>() / (width as f64).sqrt();
                let scores: Vec<f64> = (0..=i).map(|j| score(j).exp()).collect();
                let total: f64 = scores.iter().sum();
                for (j, score) in scores.iter().enumerate() {
                    for c in 0..width {
                        attended[at(i, heads, head) + c] += score / total * v[at(j, groups, group) + c];
                    }
                }
            }
        }
    }
    linear(&attended, output, hidden)
}

/// Feed-forward with a gate: projections gate, up, down.
pub(crate) fn swiglu(x: &[f64], [gate, up, down]: [&Vec<f64>; 3], hidden: usize) -> Vec<f64> {
    let inside: Vec<f64> = linear(x, gate, hidden).iter().zip(linear(x, up, hidden)).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    linear(&inside, down, gate.len() / hidden)
}

/// One layer: weights in the layout's order.
pub(crate) fn layer(x: &[f64], weights: &[Vec<f64>], config: &ModelConfig, length: usize) -> Vec<f64> {
    let add = |a: &[f64], b: Vec<f64>| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
    let [norm, query, key, value, output, second, gate, up, down] = weights else { panic!("nine weights") };
    let x = add(x, attention(&rms_norm(x, norm, config.rms_norm_eps), [query, key, value, output], config, length));
    let inside = swiglu(&rms_norm(&x, second, config.rms_norm_eps), [gate, up, down], config.hidden_size);
    add(&x, inside)
}

/// Mean cross entropy in nats.
pub(crate) fn cross_entropy(logits: &[f64], targets: &[i64], vocab: usize) -> f64 {
    let row = |(row, target): (&[f64], &i64)| row.iter().map(|v| v.exp()).sum::<f64>().ln() - row[*target as usize];
    logits.chunks(vocab).zip(targets).map(row).sum::<f64>() / targets.len() as f64
}
