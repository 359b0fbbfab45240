//! Tests of rules from a control plane.

mod control_plane;
mod convert;
mod hostile;
mod protocol;
mod tls;
mod trace;
mod vectors;
