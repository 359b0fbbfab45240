//! The protobuf messages, which the build script of the server generates.
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
    reason = "generated code"
)]

include!(concat!(env!("OUT_DIR"), "/messages.rs"));
