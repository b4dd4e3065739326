"""One program over many hosts: process 0 leads, the others replay the calls of compiled programs it makes."""
