//! Access to the head of a response, independent of the HTTP client.

use http::{HeaderMap, Response, StatusCode};

pub(crate) trait ResponseHead: Send {
    fn status(&self) -> StatusCode;

    fn headers(&self) -> &HeaderMap;
}

impl<B: Send> ResponseHead for Response<B> {
    fn status(&self) -> StatusCode {
        self.status()
    }

    fn headers(&self) -> &HeaderMap {
        self.headers()
    }
}
