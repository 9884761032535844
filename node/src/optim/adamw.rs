//! AdamW (Loshchilov and Hutter, 2019: decoupled weight decay), over flat buffers.

use std::ops::Range;

use skein_protocol::config::OptimizerSection;
use skein_protocol::message::control::Scalars;
use skein_protocol::model::GroupLayout;

/// One optimizer step's constants, rounded to f32 once.
///
/// With gradient `g = gradient_scale * sum`, in this order and without fused multiply-add:
///
/// ```text
/// m' = beta1 * m + (1 - beta1) * g
/// v' = beta2 * v + ((1 - beta2) * g) * g
/// w' = (1 - learning_rate * weight_decay) * w
///      - (learning_rate / bias_correction1) * (m' / (sqrt(v') / sqrt(bias_correction2) + epsilon))
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    gradient_scale: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    epsilon: f32,
    step_size: f32,
    root_correction2: f32,
    /// What decay leaves of a weight of two or more dimensions.
    keep: f32,
}

/// A group's state around one step: the old weights, where the new ones go, and what is changed in place.
pub struct State<'a> {
    /// The weights before.
    pub old: &'a [f32],
    /// The weights after; every value is written.
    pub new: &'a mut [f32],
    /// First moment, changed in place.
    pub m: &'a mut [f32],
    /// Second moment, changed in place.
    pub v: &'a mut [f32],
    /// The reduced gradient: the sum over the batch.
    pub sum: &'a [f32],
}

impl AdamW {
    /// The constants of the step that `scalars` belongs to.
    pub fn new(settings: &OptimizerSection, scalars: &Scalars) -> Self {
        Self {
            gradient_scale: scalars.gradient_scale,
            beta1: settings.beta1 as f32,
            rest1: (1.0 - settings.beta1) as f32,
            beta2: settings.beta2 as f32,
            rest2: (1.0 - settings.beta2) as f32,
            epsilon: settings.epsilon as f32,
            step_size: scalars.learning_rate / scalars.bias_correction1,
            root_correction2: scalars.bias_correction2.sqrt(),
            keep: 1.0 - scalars.learning_rate * settings.weight_decay as f32,
        }
    }

    /// Steps a whole group. Padding stays zero.
    ///
    /// # Panics
    /// If a buffer is not as long as the layout says.
    pub fn step(&self, layout: &GroupLayout, state: State<'_>) {
        let State { old, new, m, v, sum } = state;
        assert!([old.len(), new.len(), m.len(), v.len(), sum.len()].iter().all(|len| *len == layout.len), "buffers of the group");
        for (range, decays) in stretches(layout) {
            let keep = if decays { self.keep } else { 1.0 };
            let r = range;
            self.step_flat(keep, State { old: &old[r.clone()], new: &mut new[r.clone()], m: &mut m[r.clone()], v: &mut v[r.clone()], sum: &sum[r] });
        }
    }

    /// Steps values that share one decay. Slices of one length and no branches: the compiler vectorises it.
    fn step_flat(&self, keep: f32, state: State<'_>) {
        let len = state.old.len();
        let (old, new, m, v, sum) = (state.old, &mut state.new[..len], &mut state.m[..len], &mut state.v[..len], &state.sum[..len]);
        for i in 0..len {
            let g = sum[i] * self.gradient_scale;
            let first = self.beta1 * m[i] + self.rest1 * g;
            let second = self.beta2 * v[i] + (self.rest2 * g) * g;
            let denominator = second.sqrt() / self.root_correction2 + self.epsilon;
            m[i] = first;
            v[i] = second;
            new[i] = keep * old[i] - self.step_size * (first / denominator);
        }
    }
}

/// The buffer as stretches, each one tensor with the padding behind it, and whether it decays:
/// matrices do, scales and biases do not.
fn stretches(layout: &GroupLayout) -> impl Iterator<Item = (Range<usize>, bool)> + '_ {
    let ends = layout.tensors.iter().skip(1).map(|tensor| tensor.offset).chain([layout.len]);
    layout.tensors.iter().zip(ends).map(|(tensor, end)| (tensor.offset..end, tensor.shape.len() >= 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: OptimizerSection =
        OptimizerSection { learning_rate: 0.01, warmup_steps: 0, final_share: 0.1, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, clip: 1.0 };

    fn layout() -> GroupLayout {
        GroupLayout::new([("norm.weight".to_owned(), vec![5]), ("proj.weight".to_owned(), vec![3, 7])])
    }

    fn scalars(t: i32, gradient_scale: f32) -> Scalars {
        Scalars {
            gradient_scale,
            learning_rate: 0.01,
            bias_correction1: (1.0 - 0.9_f64.powi(t)) as f32,
            bias_correction2: (1.0 - 0.95_f64.powi(t)) as f32,
            gradient_norm: 0.0,
        }
    }

    /// A gradient that differs by place and step, zero in the padding.
    fn gradient(layout: &GroupLayout, t: i32) -> Vec<f32> {
        let mut flat = vec![0.0; layout.len];
        for tensor in &layout.tensors {
            for i in 0..tensor.len() {
                let place = i32::try_from(i).expect("small");
                flat[tensor.offset + i] = ((place * 37 + t * 101) % 23 - 11) as f32 / 7.0 * [0.01, 0.1, 1.0, 10.0][i % 4];
            }
        }
        flat
    }

    struct Run {
        weights: Vec<f32>,
        m: Vec<f32>,
        v: Vec<f32>,
    }

    fn run(steps: i32, scale: f32, start: &[f32]) -> Run {
        let layout = layout();
        let mut run = Run { weights: start.to_vec(), m: vec![0.0; layout.len], v: vec![0.0; layout.len] };
        for t in 1..=steps {
            let mut new = vec![f32::NAN; layout.len];
            let state = State { old: &run.weights, new: &mut new, m: &mut run.m, v: &mut run.v, sum: &gradient(&layout, t) };
            AdamW::new(&SETTINGS, &scalars(t, scale)).step(&layout, state);
            run.weights = new;
        }
        run
    }

    fn start(layout: &GroupLayout) -> Vec<f32> {
        gradient(layout, 50).iter().map(|value| value * 0.5).collect()
    }

    /// The formula as published, in f64 and another arrangement: bias-corrected moments.
    fn reference(steps: i32, scale: f64, start: f64, gradient_at: impl Fn(i32) -> f64, decay: f64) -> (f64, f64, f64) {
        let (mut w, mut m, mut v) = (start, 0.0, 0.0);
        for t in 1..=steps {
            let g = gradient_at(t) * scale;
            m = 0.9 * m + 0.1 * g;
            v = 0.95 * v + 0.05 * g * g;
            let (m_hat, v_hat) = (m / (1.0 - 0.9_f64.powi(t)), v / (1.0 - 0.95_f64.powi(t)));
            w -= 0.01 * (m_hat / (v_hat.sqrt() + 1e-8) + decay * w);
        }
        (w, m, v)
    }

    /// Within a few roundings of terms as large as `size`.
    fn close(found: f32, expected: f64, size: f64) -> bool {
        (f64::from(found) - expected).abs() <= 5e-7 * size.max(expected.abs())
    }

    #[test]
    fn steps_follow_the_formula_with_decay_on_matrices_alone() {
        let layout = layout();
        let start = start(&layout);
        for scale in [1.0_f32, 0.25] {
            let run = run(12, scale, &start);
            for tensor in &layout.tensors {
                let decay = if tensor.name == "proj.weight" { 0.1 } else { 0.0 };
                for (at, begin) in start.iter().enumerate().skip(tensor.offset).take(tensor.len()) {
                    let gradient_at = |t| f64::from(gradient(&layout, t)[at]);
                    let (w, m, v) = reference(12, f64::from(scale), f64::from(*begin), gradient_at, decay);
                    let size = (1..=12).map(|t| (gradient_at(t) * f64::from(scale)).abs()).fold(0.0, f64::max);
                    let found = (run.weights[at], run.m[at], run.v[at]);
                    let fits = close(found.0, w, begin.abs().into()) && close(found.1, m, size) && close(found.2, v, size * size);
                    assert!(fits, "{} at {at}: {found:?}, expected {:?}", tensor.name, (w, m, v));
                }
            }
        }
    }

    #[test]
    fn the_first_step_moves_by_the_learning_rate_whatever_the_gradient() {
        let layout = layout();
        let start = start(&layout);
        let run = run(1, 1.0, &start);
        let sign = gradient(&layout, 1)[0].signum();
        assert!((run.weights[0] - (start[0] - 0.01 * sign)).abs() < 1e-6);
    }

    #[test]
    fn the_clip_scale_is_applied_to_the_gradient_and_padding_stays_zero() {
        let layout = layout();
        let run = run(1, 0.125, &vec![0.0; layout.len]);
        let g = gradient(&layout, 1)[17] * 0.125;
        assert!(close(run.m[17], 0.1 * f64::from(g), 0.0) && close(run.v[17], 0.05 * f64::from(g).powi(2), 0.0));
        let padding: Vec<usize> = (5..16).chain(16 + 21..layout.len).collect();
        assert!(padding.iter().all(|at| run.weights[*at] == 0.0 && run.m[*at] == 0.0 && run.v[*at] == 0.0));
    }

    #[test]
    fn the_result_is_pinned_to_the_bit() {
        let layout = layout();
        let run = run(3, 0.5, &start(&layout));
        let mut hasher = blake3::Hasher::new();
        run.weights.iter().chain(&run.m).chain(&run.v).for_each(|value| {
            hasher.update(&value.to_le_bytes());
        });
        assert_eq!(hasher.finalize().to_hex().as_str()[..16], *"039fec3bebb4ea5a");
    }
}
