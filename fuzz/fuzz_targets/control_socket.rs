#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| blkq_fuzz::control_socket::check(input));
