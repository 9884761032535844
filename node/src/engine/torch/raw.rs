//! The unsafe code of this crate: tensors over memory of ours, and the memory of tensors.

#![expect(unsafe_code, reason = "libtorch's memory and libraries are reached through raw pointers; everything that does so is in this file")]

use tch::{Device, Kind, TchError, Tensor};

/// A CPU tensor over `values`, which it neither copies nor owns.
///
/// It outlives the borrow. What makes this sound is the invariant of
/// [`Compute`](crate::engine::core::Compute): whoever passes weights to it keeps them in place and
/// unwritten until the graphs made from them are dropped, and only graphs hold these tensors. Nobody
/// writes through them: weights are leaves, and nothing here changes a leaf in place.
pub(super) fn view(values: &[f32], shape: &[i64]) -> Result<Tensor, TchError> {
    let count: i64 = shape.iter().product();
    if usize::try_from(count) != Ok(values.len()) {
        return Err(TchError::Shape(format!("{} values do not have the shape {shape:?}", values.len())));
    }
    // SAFETY: the pointer is valid for as many f32 as the shape has; how long, says the comment above.
    unsafe { Tensor::f_from_blob(values.as_ptr().cast(), shape, &[], Kind::Float, Device::Cpu) }
}

/// The values of a tensor of f32 that is contiguous on the CPU.
pub(super) fn values(tensor: &Tensor) -> Result<&[f32], TchError> {
    if tensor.device() != Device::Cpu || tensor.f_kind()? != Kind::Float || !tensor.is_contiguous() {
        return Err(TchError::Kind("expected contiguous f32 values on the CPU".to_owned()));
    }
    if tensor.numel() == 0 {
        return Ok(&[]);
    }
    // SAFETY: a contiguous CPU tensor has its elements in one piece from its data pointer on; the
    // tensor keeps them alive, and nothing here writes to a tensor that someone reads this way.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<f32>(), tensor.numel()) })
}

/// Loads a library for the rest of the process, its symbols visible to all others.
#[cfg(unix)]
pub(super) fn load_forever(path: &std::path::Path) -> Result<(), libloading::Error> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: only for libraries of libtorch itself, whose initializers register kernels and expect
    // to run in any thread before the first call.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL)? };
    // Registered kernels point into it: it must never be closed.
    std::mem::forget(library);
    Ok(())
}
