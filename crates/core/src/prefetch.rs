//! Memory that is needed soon, asked for ahead of time.

/// Whether there is a way to ask: with stable Rust, on this processor only.
pub(crate) const PREFETCHES: bool = cfg!(target_arch = "x86_64");

/// Begins to fetch the cache line in which `place` begins, and does not wait for it.
#[inline]
pub(crate) fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    safe_arch::prefetch_t0(place);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
