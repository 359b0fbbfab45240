//! The messages on the wire, as `build.rs` generates them from the files under `proto/`.
#![allow(
    clippy::all,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    clippy::or_fun_call,
    clippy::use_self,
    missing_docs,
    missing_debug_implementations,
    dead_code,
    unnameable_types,
    unreachable_pub,
    unused_qualifications,
    reason = "generated, and as its generator would have it"
)]

include!(concat!(env!("OUT_DIR"), "/messages.rs"));

/// The same files for reflection, as a serialised `FileDescriptorSet`.
pub(super) const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
