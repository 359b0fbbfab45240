//! Arbitrary strings as an access log. For every format, each line must be parsed or result in an
//! error.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // Invalid UTF-8 is replaced, as when logs are read.
    let text = String::from_utf8_lossy(bytes);
    tidegate_simulate::parse_in_every_format(&text);
});
