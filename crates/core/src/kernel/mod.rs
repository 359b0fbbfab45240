//! kernels (being written)
use crate::limit::{Limit, LimitError};
#[derive(Clone, Debug)]
pub(crate) struct Kernel;
impl Kernel { pub(crate) fn compile(_limit: &Limit) -> Result<Self, LimitError> { Ok(Self) } }
