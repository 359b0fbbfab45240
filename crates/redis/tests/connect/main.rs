//! The way to real servers: what is said when they cannot be asked, and that they are asked again when they can.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../support/mod.rs"]
mod support;

mod asked;
mod cluster;
mod faults;
mod login;
mod refused;
mod sentinels;
mod tls;
