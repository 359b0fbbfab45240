//! `tidegate`: serve, check, and the operator's verbs.
fn main() {}
