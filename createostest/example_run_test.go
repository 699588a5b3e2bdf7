package createostest_test

import "testing"

// The examples that need a *testing.T are tests themselves.
func TestExampleBuild(t *testing.T) { testBuild(t) }
func TestExampleHour(t *testing.T)  { testHour(t) }
