//! Lints: warnings about valid rules files that probably do not do what their author intended.

pub(super) mod bypass;
pub(super) mod dead_conditions;
pub(super) mod exact_path;
mod misread;
pub(super) mod no_burst;
pub(super) mod proxy;
