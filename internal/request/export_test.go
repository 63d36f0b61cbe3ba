package request

// Readings is readings, for tests.
var Readings = readings
