package gmail

// HandOver is handOver, for the fuzz target.
var HandOver = handOver
