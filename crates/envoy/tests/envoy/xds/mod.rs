//! Tests of rules from a control plane.

mod control_plane;
mod convert;
mod hostile;
mod plane;
mod protocol;
mod python;
mod tls;
mod trace;
mod vectors;
