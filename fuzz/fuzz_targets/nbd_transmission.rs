#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| blkq_fuzz::nbd_transmission::check(input));
