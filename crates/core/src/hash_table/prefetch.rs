//! Prefetching: loading memory into the CPU caches before it is read.

/// Whether prefetching is available. Stable Rust supports prefetching on x86-64 only.
pub(crate) const PREFETCHES: bool = cfg!(target_arch = "x86_64");

/// Starts to load the cache line that contains the first byte of `place`, and does not wait for the
/// cache line.
#[inline]
pub(crate) fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    safe_arch::prefetch_t0(place);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
