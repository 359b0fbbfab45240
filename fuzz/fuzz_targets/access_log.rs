//! Arbitrary text as an access log: every format parses each line, or says what is wrong.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // As the reader of logs does.
    let text = String::from_utf8_lossy(bytes);
    tidegate_simulate::parse_in_every_format(&text);
});
