BEGIN TRANSACTION;
CREATE TABLE device (
	device_id VARCHAR NOT NULL, 
	board VARCHAR NOT NULL, 
	evidence VARCHAR NOT NULL, 
	mode_count INTEGER NOT NULL, 
	state VARCHAR NOT NULL, 
	profiled_modes INTEGER NOT NULL, 
	detail VARCHAR NOT NULL, 
	front VARCHAR, 
	idle_w FLOAT, 
	reference_digest VARCHAR NOT NULL, 
	PRIMARY KEY (device_id)
);
INSERT INTO "device" VALUES('orin','agx-orin','simulated',18096,'ready',50,'parked','{"points": [{"mode": {"cores": 4, "cpuKhz": 1500000, "gpuHz": "600000000", "memHz": "2133000000"}, "epochS": 10.0, "powerW": 50.0}, {"mode": {"cores": 4, "cpuKhz": 1499999, "gpuHz": "600000000", "memHz": "2133000000"}, "epochS": 20.0, "powerW": 30.0}, {"mode": {"cores": 4, "cpuKhz": 1499998, "gpuHz": "600000000", "memHz": "2133000000"}, "epochS": 40.0, "powerW": 20.0}]}',5.0,'a digest');
INSERT INTO "device" VALUES('nano','agx-orin','simulated',18096,'ready',50,'parked','{"points": [{"mode": {"cores": 4, "cpuKhz": 1500000, "gpuHz": "600000000", "memHz": "2133000000"}, "epochS": 35.0, "powerW": 15.0}, {"mode": {"cores": 4, "cpuKhz": 1499999, "gpuHz": "600000000", "memHz": "2133000000"}, "epochS": 60.0, "powerW": 10.0}]}',3.0,'a digest');
INSERT INTO "device" VALUES('new','orin-nx','hardware',5824,'enrolled',0,'',NULL,NULL,'');
CREATE TABLE node (
	node_id VARCHAR NOT NULL, 
	device_id VARCHAR NOT NULL, 
	PRIMARY KEY (node_id)
);
INSERT INTO "node" VALUES('18446744073709551615','orin');
INSERT INTO "node" VALUES('9223372036854775813','nano');
CREATE TABLE observation (
	plan_id VARCHAR NOT NULL, 
	device_id VARCHAR NOT NULL, 
	epoch_s DOUBLE NOT NULL, 
	power_w DOUBLE NOT NULL, 
	PRIMARY KEY (plan_id, device_id)
);
INSERT INTO "observation" VALUES('4711/1','orin',21.0,31.0);
INSERT INTO "observation" VALUES('4711/1','nano',34.0,14.5);
CREATE TABLE round (
	"order" INTEGER NOT NULL, 
	plan_id VARCHAR NOT NULL, 
	run_id VARCHAR NOT NULL, 
	number INTEGER NOT NULL, 
	epochs DOUBLE NOT NULL, 
	"plan" VARCHAR NOT NULL, 
	idle_w DOUBLE NOT NULL, 
	failed JSON NOT NULL, 
	metrics JSON NOT NULL, 
	wall_s FLOAT, 
	PRIMARY KEY ("order"), 
	UNIQUE (plan_id)
);
INSERT INTO "round" VALUES(1,'4711/1','4711',1,1.5,'{"planId": "4711/1", "assignments": [{"nodeId": "9223372036854775813", "deviceId": "nano", "mode": {"cores": 4, "cpuKhz": 1500000, "gpuHz": "600000000", "memHz": "2133000000"}, "epochS": 35.0, "powerW": 15.0, "powerLimitW": 15.0}, {"nodeId": "18446744073709551615", "deviceId": "orin", "mode": {"cores": 4, "cpuKhz": 1499999, "gpuHz": "600000000", "memHz": "2133000000"}, "epochS": 20.0, "powerW": 30.0, "powerLimitW": 30.0}], "decisions": [{"deviceId": "nano", "selected": true, "reason": "one of the 2 that together finish soonest: done within 52.5 s for 12.0 W above idling"}, {"deviceId": "orin", "selected": true, "reason": "one of the 2 that together finish soonest: done within 52.5 s for 25.0 W above idling"}], "durationS": 52.5, "plannedW": 45.0, "siteBudgetW": 100.0, "supplies": [{"supply": "site", "budgetW": 100.0, "plannedW": 45.0}]}',0.0,'["nano"]','{"accuracy": 0.5, "loss": NaN}',41.5);
INSERT INTO "round" VALUES(2,'4711/2','4711',2,1.5,'{"planId": "4711/2", "assignments": [{"nodeId": "9223372036854775813", "deviceId": "nano", "mode": {"cores": 4, "cpuKhz": 1500000, "gpuHz": "600000000", "memHz": "2133000000"}, "epochS": 35.0, "powerW": 15.0, "powerLimitW": 15.0}, {"nodeId": "18446744073709551615", "deviceId": "orin", "mode": {"cores": 4, "cpuKhz": 1499999, "gpuHz": "600000000", "memHz": "2133000000"}, "epochS": 20.0, "powerW": 30.0, "powerLimitW": 30.0}], "decisions": [{"deviceId": "nano", "selected": true, "reason": "one of the 2 that together finish soonest: done within 52.5 s for 12.0 W above idling"}, {"deviceId": "orin", "selected": true, "reason": "one of the 2 that together finish soonest: done within 52.5 s for 25.0 W above idling"}], "durationS": 52.5, "plannedW": 45.0, "siteBudgetW": 100.0, "supplies": [{"supply": "site", "budgetW": 100.0, "plannedW": 45.0}]}',0.0,'[]','{}',NULL);
CREATE TABLE round_results (
	plan_id VARCHAR NOT NULL, 
	results JSON NOT NULL, 
	PRIMARY KEY (plan_id)
);
INSERT INTO "round_results" VALUES('4711/1','[{"device_id": "orin", "failure": "", "num_examples": 96.0, "loss": 0.125, "share": 1.0}, {"device_id": "nano", "failure": "the node is gone", "num_examples": null, "loss": null, "share": 0.0}]');
INSERT INTO "round_results" VALUES('4711/2','[]');
CREATE TABLE run (
	"order" INTEGER NOT NULL, 
	run_id VARCHAR NOT NULL, 
	strategy VARCHAR NOT NULL, 
	rounds INTEGER NOT NULL, 
	initial_metrics JSON NOT NULL, 
	error VARCHAR NOT NULL, 
	finished BOOLEAN NOT NULL, 
	PRIMARY KEY ("order"), 
	UNIQUE (run_id)
);
INSERT INTO "run" VALUES(1,'4711','FedAvg',3,'{"accuracy": 0.1}','',0);
INSERT INTO "run" VALUES(2,'4710','FedAdam',7,'{}','ValueError: no',1);
CREATE INDEX ix_round_run_id ON round (run_id);
COMMIT;
